"""Repository rules for packages that are installed on this machine.

The Python packages are looked up with the interpreter that the environment
variable PYTHON_BIN names, by default python3. Change it, or run `bazel sync
--configure`, after TensorFlow was installed anew.
"""

def _python(repository_ctx):
    """The path of the interpreter to ask."""
    name = repository_ctx.os.environ.get("PYTHON_BIN", "python3")
    if "/" in name and not name.startswith("/"):
        fail("PYTHON_BIN must be a name or an absolute path, not %s" % name)
    python = repository_ctx.path(name) if "/" in name else repository_ctx.which(name)
    if python == None or not python.exists:
        fail("There is no %s; set PYTHON_BIN to a Python that has TensorFlow" % name)
    return python

def _ask_python(repository_ctx, script, needs):
    """Runs a script that prints one `key=value` per line.

    Args:
      repository_ctx: The rule's context.
      script: Python source.
      needs: What must be installed for it to work, for the error message.

    Returns:
      The printed lines as a dictionary.
    """
    python = _python(repository_ctx)
    result = repository_ctx.execute(
        [python, "-c", script],
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
        timeout = 600,
    )
    if result.return_code != 0:
        fail("%s could not be asked for %s; is it installed, or should PYTHON_BIN be set?\n%s" %
             (python, needs, result.stderr))
    answers = {}
    for line in result.stdout.splitlines():
        key, separator, value = line.partition("=")
        if separator:
            answers[key] = value
    return answers

_ASK_TENSORFLOW = """
import os
import tensorflow as tf
print("version=" + tf.__version__)
print("include=" + tf.sysconfig.get_include())
print("lib=" + tf.sysconfig.get_lib())
flags = tf.sysconfig.get_compile_flags()
print("flags=" + " ".join(f for f in flags if not f.startswith("-I")))
names = [f[3:] for f in tf.sysconfig.get_link_flags() if f.startswith("-l:")]
print("libraries=" + " ".join(names))
"""

# The headers come through a link inside the repository, so that no path points
# out of it: the sandbox holds the declared files, and the check of inclusions
# sees declared paths. Eigen's own headers have no extension.
_TENSORFLOW_BUILD = """
package(default_visibility = ["//visibility:public"])

# TensorFlow {version}

cc_library(
    name = "headers",
    hdrs = glob(
        ["include/**"],
        exclude = ["include/**/*.py", "include/**/*.proto", "include/**/LICENSE*"],
    ),
    defines = {defines},
    includes = ["include"],
)

# Abseil's headers alone, for code that uses nothing but its annotations.
cc_library(
    name = "absl_headers",
    hdrs = glob(["include/absl/**"]),
    includes = ["include"],
)

cc_library(
    name = "framework",
    srcs = {libraries},
)
"""

_TENSORFLOW_FLAGS = '''"""How TensorFlow {version} wants its extensions to be compiled."""

TF_COPTS = {copts}
'''

def _pip_tensorflow_impl(repository_ctx):
    answers = _ask_python(repository_ctx, _ASK_TENSORFLOW, "TensorFlow")
    repository_ctx.symlink(answers["include"], "include")
    libraries = answers["libraries"].split(" ")
    for library in libraries:
        repository_ctx.symlink(answers["lib"] + "/" + library, library)
    flags = answers["flags"].split(" ")
    repository_ctx.file("BUILD", _TENSORFLOW_BUILD.format(
        version = answers["version"],
        # Whoever includes the headers has to agree on these, the ABI first.
        defines = [flag[2:] for flag in flags if flag.startswith("-D")],
        libraries = libraries,
    ))
    repository_ctx.file("flags.bzl", _TENSORFLOW_FLAGS.format(
        version = answers["version"],
        copts = [flag for flag in flags if not flag.startswith("-D")],
    ))

pip_tensorflow = repository_rule(
    doc = """The installed TensorFlow.

    Offers @pip_tensorflow//:headers, :absl_headers and :framework (the shared
    library that ops link to), and TF_COPTS in @pip_tensorflow//:flags.bzl.
    """,
    implementation = _pip_tensorflow_impl,
    environ = ["PYTHON_BIN"],
    configure = True,
    local = True,
)

_ASK_PYTHON = """
import sysconfig
import pybind11
print("python=" + sysconfig.get_paths()["include"])
print("pybind11=" + pybind11.get_include())
"""

_PYTHON_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "pybind11",
    hdrs = glob(["python/**/*.h", "pybind11/**/*.h"]),
    includes = ["python", "pybind11"],
)
"""

def _python_extension_impl(repository_ctx):
    answers = _ask_python(repository_ctx, _ASK_PYTHON, "pybind11 and Python's headers")
    if not repository_ctx.path(answers["python"] + "/Python.h").exists:
        fail("%s/Python.h is missing; install the headers of this Python, " % answers["python"] +
             "say with apt-get install python3-dev")
    repository_ctx.symlink(answers["python"], "python")
    repository_ctx.symlink(answers["pybind11"], "pybind11")
    repository_ctx.file("BUILD", _PYTHON_BUILD)

python_extension = repository_rule(
    doc = """Offers @python_extension//:pybind11, with Python's own headers.""",
    implementation = _python_extension_impl,
    environ = ["PYTHON_BIN"],
    configure = True,
    local = True,
)

# The compiler finds the headers by itself, they lie where it always looks.
_GTEST_BUILD = """
cc_library(
    name = "gtest_main",
    linkopts = ["-lgtest", "-lgtest_main", "-pthread"],
    visibility = ["//visibility:public"],
)
"""

def _system_gtest_impl(repository_ctx):
    folders = ["/usr/include", "/usr/local/include"]
    if not any([repository_ctx.path(f + "/gtest/gtest.h").exists for f in folders]):
        fail("GoogleTest is missing; apt-get install libgtest-dev")
    repository_ctx.file("BUILD", _GTEST_BUILD)

system_gtest = repository_rule(
    doc = """GoogleTest as the system installs it, @system_gtest//:gtest_main.""",
    implementation = _system_gtest_impl,
    local = True,
)
