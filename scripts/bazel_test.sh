#!/bin/bash
# Proves that the Bazel build works: builds the op library and the engine
# module, runs the C++ tests, then loads what was built into TensorFlow and
# calls an op.
#
#   scripts/bazel_test.sh           # arguments go to bazel, say -c opt
#
# For Debian's Bazel 4.2.3, which is packaged without some of the repositories
# that its own tools refer to: those come from other packages or, as stubs, from
# bazel/, so that nothing is downloaded. Another Bazel may do without them.
# Needs TensorFlow and pybind11 in $PYTHON_BIN, by default that of .venv if there
# is one, else python3.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly RULES_JAVA=/usr/share/bazel/rules/java
readonly RULES_PROTO=/usr/share/bazel/rules/proto
readonly PLATFORMS=/usr/share/bazel/tools/platforms

step() {
  echo
  echo "== $*"
}

step "Looking for what the build needs"
missing=()
command -v bazel > /dev/null || missing+=(bazel-bootstrap)
[[ -d "$RULES_JAVA" ]] || missing+=(bazel-rules-java)
[[ -d "$RULES_PROTO" ]] || missing+=(bazel-rules-proto)
[[ -d "$PLATFORMS" ]] || missing+=(bazel-platforms)
command -v "${CC:-gcc}" > /dev/null || missing+=(g++)
[[ -f /usr/include/gtest/gtest.h ]] || missing+=(libgtest-dev)
if [[ ${#missing[@]} -gt 0 ]]; then
  echo "bazel_test.sh: missing Debian packages; apt-get install ${missing[*]}" >&2
  exit 1
fi
if [[ -z "${PYTHON_BIN:-}" ]]; then
  PYTHON_BIN="$(command -v python3 || true)"
  [[ -x .venv/bin/python ]] && PYTHON_BIN="$PWD/.venv/bin/python"
fi
# Bazel runs it in other folders.
[[ "$PYTHON_BIN" != */* ]] || PYTHON_BIN="$(realpath --no-symlinks "$PYTHON_BIN")"
export PYTHON_BIN
"$PYTHON_BIN" -c "
import importlib.util, sys
missing = [n for n in ('tensorflow', 'pybind11') if importlib.util.find_spec(n) is None]
if missing:
    sys.exit(f'bazel_test.sh: {sys.executable} has no ' + ' and no '.join(missing))
"
echo "Bazel: $(command -v bazel)"
echo "Python: $PYTHON_BIN"

# The sandbox that needs no user namespaces, so that this runs in containers.
options=(
  "--override_repository=rules_java=$RULES_JAVA"
  "--override_repository=rules_proto=$RULES_PROTO"
  "--override_repository=platforms=$PLATFORMS"
  "--override_repository=rules_cc=$PWD/bazel/rules_cc_stub"
  "--override_repository=remote_coverage_tools=$PWD/bazel/remote_coverage_tools_stub"
  "--spawn_strategy=processwrapper-sandbox"
  "--curses=no"
  "--show_progress_rate_limit=10"
  "$@"
)
# The server ends by itself soon after the last command.
bazel=(bazel --max_idle_secs=60)

step "Building the op library and the engine module"
"${bazel[@]}" build "${options[@]}" //:_recsync_ops.so //:_engine.so

step "Running the C++ tests"
"${bazel[@]}" test "${options[@]}" --keep_going --test_output=errors //:all

step "Calling an op of the built library"
built="$("${bazel[@]}" info "${options[@]}" bazel-bin 2> /dev/null)"
TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=0 "$PYTHON_BIN" - "$built" << 'END'
import sys

import numpy as np
import tensorflow as tf

built = sys.argv[1]
ops = tf.load_op_library(built + "/_recsync_ops.so")
x = np.array([[1.0, -2.0], [3.0, -6.0]], np.float32)
y, mean = ops.recsync_mean_normalize(x=x, alpha=[1.0, 2.0], beta=[0.0, 0.5])
np.testing.assert_allclose(mean, x.mean(axis=0))
np.testing.assert_allclose(y, np.array([1.0, 2.0]) * x / x.mean(axis=0) - [0.0, 0.5], rtol=1e-6)
print(f"RecsyncMeanNormalize works with TensorFlow {tf.__version__}")

sys.path.insert(0, built)
import _engine  # noqa: E402

counters = np.zeros(_engine.STALENESS_COUNTERS, np.int64)
assert _engine.staleness_summary(counters)["count"] == 0
print("_engine works")
END

step "The Bazel build works"
