#!/bin/bash
# Builds the C++ tests of the engine (cc/engine/*_test.cc) under the sanitizers
# and runs them.
#
#   scripts/cc_test.sh                    # all three
#   scripts/cc_test.sh thread             # one of undefined, thread, address
#   CXX=g++-13 scripts/cc_test.sh
#
# Needs libgtest-dev, and TensorFlow for its headers only (absl's annotations):
# in $PYTHON_BIN, by default that of .venv if there is one, else python3.
# Builds incrementally in build/cc-test/; $CXXFLAGS are added to the flags.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly CXX="${CXX:-g++}"
readonly WARNINGS="-Wall -Wextra -Werror"

fail() {
  echo "cc_test.sh: $*" >&2
  exit 1
}

python="${PYTHON_BIN:-}"
if [[ -z "$python" ]]; then
  python=python3
  [[ -x .venv/bin/python ]] && python=.venv/bin/python
fi

sanitizers=("$@")
[[ $# -gt 0 ]] || sanitizers=(undefined thread address)
for sanitizer in "${sanitizers[@]}"; do
  case "$sanitizer" in
    undefined | thread | address) ;;
    *) fail "unknown sanitizer '$sanitizer'; there are undefined, thread, address" ;;
  esac
done

command -v make > /dev/null || fail "make is missing; apt-get install make"
command -v "${CXX%% *}" > /dev/null || fail "the compiler $CXX is missing; apt-get install g++"
echo '#include <gtest/gtest.h>' | $CXX -std=c++17 -x c++ -fsyntax-only - 2> /dev/null ||
  fail "GoogleTest is missing; apt-get install libgtest-dev"

# Where TensorFlow lies, without the seconds that importing it takes.
include=$("$python" - << 'END'
import importlib.util
spec = importlib.util.find_spec("tensorflow")
if spec is not None:
    print(spec.submodule_search_locations[0] + "/include")
END
) || fail "$python does not run; set PYTHON_BIN"
[[ -f "$include/absl/base/thread_annotations.h" ]] ||
  fail "$python has no TensorFlow with headers; pip install it, or set PYTHON_BIN"

flags_of() {
  case "$1" in
    undefined) echo "-fsanitize=undefined -fno-sanitize-recover=all" ;;
    thread) echo "-fsanitize=thread" ;;
    address) echo "-fsanitize=address,undefined -fno-sanitize-recover=all" ;;
  esac
}

tests=(cc/engine/*_test.cc)
sources=()
for source in cc/engine/*.cc; do
  [[ "$source" == *_test.cc ]] || sources+=("$source")
done

# Writes build/cc-test/<sanitizer>/Makefile, only if it differs: objects depend
# on it, so that other flags compile them again.
write_makefile() {
  local folder="$1" flags="$2" source name
  {
    echo "CXX := $CXX"
    echo "FLAGS := -std=c++17 -O1 -g -fno-omit-frame-pointer -pthread $WARNINGS $flags \\"
    echo "  -I. -isystem $include ${CXXFLAGS:-}"
    echo "all: $(for source in "${tests[@]}"; do
      echo -n "$folder/$(basename "$source" .cc) "
    done)"
    echo "$folder/%.o: cc/engine/%.cc $folder/Makefile"
    # shellcheck disable=SC2016
    echo '	@$(CXX) $(FLAGS) -MMD -MP -c $< -o $@'
    echo "ENGINE := $(for source in "${sources[@]}"; do
      echo -n "$folder/$(basename "$source" .cc).o "
    done)"
    for source in "${tests[@]}"; do
      name="$(basename "$source" .cc)"
      echo "$folder/$name: $folder/$name.o \$(ENGINE)"
      # shellcheck disable=SC2016
      echo '	@$(CXX) $(FLAGS) $^ -lgtest -lgtest_main -ldl -o $@'
    done
    echo ".SECONDARY:"
    echo "-include $folder/*.d"
  } > "$folder/Makefile.new"
  if cmp -s "$folder/Makefile.new" "$folder/Makefile"; then
    rm "$folder/Makefile.new"
  else
    mv "$folder/Makefile.new" "$folder/Makefile"
  fi
}

# The number in front of "tests" in GoogleTest's summary line of a kind.
count_of() {
  sed -n "s/^\[  $1 *\] \([0-9]*\) tests\{0,1\}\(\.\|, listed below:\)\$/\1/p" "$2" | head -n 1
}

all_passed=0
all_failed=0
for sanitizer in "${sanitizers[@]}"; do
  folder="build/cc-test/$sanitizer"
  mkdir -p "$folder"
  write_makefile "$folder" "$(flags_of "$sanitizer")"
  # What does not compile counts as a failure below; the rest is still run.
  make --no-print-directory -k -j2 -f "$folder/Makefile" all || true
  passed=0
  failed=0
  for source in "${tests[@]}"; do
    name="$(basename "$source" .cc)"
    log="$folder/$name.log"
    if ! make -q -f "$folder/Makefile" "$folder/$name" 2> /dev/null; then
      echo "$sanitizer: $name was not built"
      failed=$((failed + 1))
      continue
    fi
    status=0
    RECSYNC_SIMULATION_PERCENT="${RECSYNC_SIMULATION_PERCENT:-3}" \
      TSAN_OPTIONS="halt_on_error=0 second_deadlock_stack=1 ${TSAN_OPTIONS:-}" \
      UBSAN_OPTIONS="print_stacktrace=1 ${UBSAN_OPTIONS:-}" \
      "$folder/$name" --gtest_color=no > "$log" 2>&1 || status=$?
    ok="$(count_of PASSED "$log")"
    bad="$(count_of FAILED "$log")"
    # A sanitizer's report fails a run in which every test passed, and a crash
    # leaves no summary at all.
    [[ $status -eq 0 || ${bad:-0} -gt 0 ]] || bad=1
    passed=$((passed + ${ok:-0}))
    failed=$((failed + ${bad:-0}))
    if [[ $status -ne 0 ]]; then
      echo "$sanitizer: $name failed with status $status; the end of $log:"
      tail -n 60 "$log"
    fi
  done
  if [[ $failed -eq 0 ]]; then
    echo "$sanitizer: ok, $passed tests in ${#tests[@]} files passed"
  else
    echo "$sanitizer: FAILED, $passed tests passed, $failed failed"
  fi
  all_passed=$((all_passed + passed))
  all_failed=$((all_failed + failed))
done

echo "$all_passed passed, $all_failed failed"
[[ $all_failed -eq 0 && $all_passed -gt 0 ]]
