"""The rules of rules_cc that Bazel's own tools load: the native ones.

Debian packages Bazel without rules_cc; scripts/bazel_test.sh puts this folder
in its place.
"""

cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
