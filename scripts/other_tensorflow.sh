#!/bin/bash
# Whether the package builds with another TensorFlow, and passes its tests with it:
#
#   scripts/other_tensorflow.sh tf-nightly-cpu
#   scripts/other_tensorflow.sh 'tensorflow-cpu==2.22.*' -k staleness
#
# The first argument is what pip installs in the place of the TensorFlow that pyproject.toml asks
# for; the others go to pytest. Works on a copy of the files that git knows, in a folder of its own
# that is removed at the end, so that nothing here changes. For a nightly job: it ends with the
# status of the step that failed, and says which one that was.

set -euo pipefail
if [[ $# -lt 1 ]]; then
  echo "usage: scripts/other_tensorflow.sh REQUIREMENT [arguments of pytest]" >&2
  exit 2
fi
requirement="$1"
shift
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$(mktemp -d)"
step="copying"
finish() {
  status=$?
  rm -rf "$folder"
  if [[ $status -ne 0 ]]; then
    echo "== With $requirement: $step failed" >&2
  else
    echo "== With $requirement: all passed"
  fi
}
trap finish EXIT

git -C "$root" ls-files -z | (cd "$root" && xargs -0 cp --parents --target-directory="$folder")
cd "$folder"
# What the package and setup.py check, and what refuses other versions.
export TF_RECSYNC_ANY_TENSORFLOW=1 TF_CPP_MIN_LOG_LEVEL=2

step="installing"
echo "== Installing $requirement"
"${PYTHON:-python3}" -m venv .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet)
"${pip[@]}" install "$requirement"
"${pip[@]}" install setuptools wheel pybind11
.venv/bin/python - > requirements.txt << 'END'
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"]["dev"], sep="\n")
END
"${pip[@]}" install -r requirements.txt
.venv/bin/python -c 'import keras, tensorflow as tf; print("TensorFlow", tf.__version__, "Keras", keras.__version__)'

step="building"
echo "== Building"
# Without the dependencies, among which the TensorFlow is that it needs.
"${pip[@]}" install --no-build-isolation --no-deps --editable .

step="testing"
echo "== Testing"
.venv/bin/python -m pytest -n "${TEST_PROCESSES:-3}" --dist loadfile --max-worker-restart=0 "$@"
