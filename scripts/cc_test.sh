#!/bin/bash
# Builds the C++ tests of the engine and of the simulations that run on it
# (*_test.cc in cc/engine and cc/simulation) and runs them, both side by side on
# all cores.
#
#   scripts/cc_test.sh                           # all builds, all tests
#   scripts/cc_test.sh thread                    # one build
#   scripts/cc_test.sh thread hop_worker_test    # one test in one build
#   scripts/cc_test.sh timer_test link_test      # two tests in all builds
#   FULL=1 scripts/cc_test.sh                    # longer simulations, see below
#   RECSYNC_SIMULATION_PERCENT=50 scripts/cc_test.sh address
#   CXX=g++-13 JOBS=1 GTEST_FILTER='*Token*' scripts/cc_test.sh
#
# The builds:
#   thread   -fsanitize=thread
#   address  -fsanitize=address,undefined
#   plain    -O2 without a sanitizer; unless tests are named, only simulations
#
# A simulation is a test that does as many random runs as SimulationLength
# (cc/engine/simulation_length_testing.h) says. The percentage of its full
# length, by default and with FULL=1:
#   thread    0.2     3  Tens of times as slow, with a single thread to watch.
#   address   1      10  Wrong accesses show in the first runs.
#   plain    10     100  Where the protocol itself is tried.
#
# Needs libgtest-dev, and TensorFlow for its headers only (absl's annotations):
# in $PYTHON_BIN, by default that of .venv if there is one, else python3.
# Builds incrementally in build/cc-test/; $CXXFLAGS are added to the flags.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly CXX="${CXX:-g++}"
readonly BUILDS=(thread address plain)
readonly ROOT=build/cc-test
readonly FOLDERS=(cc/engine cc/simulation)  # No two of their sources share a name.

fail() {
  echo "cc_test.sh: $*" >&2
  exit 1
}

python="${PYTHON_BIN:-}"
if [[ -z "$python" ]]; then
  python=python3
  [[ -x .venv/bin/python ]] && python=.venv/bin/python
fi

builds=()
named_tests=()
for argument in "$@"; do
  if [[ " ${BUILDS[*]} " == *" $argument "* ]]; then
    builds+=("$argument")
  elif [[ "$argument" == *_test && -n "$(find "${FOLDERS[@]}" -name "$argument.cc")" ]]; then
    named_tests+=("$argument")
  else
    fail "'$argument' is neither a build (${BUILDS[*]}) nor a test in ${FOLDERS[*]}"
  fi
done
[[ ${#builds[@]} -gt 0 ]] || builds=("${BUILDS[@]}")

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
    thread) echo "-O1 -fsanitize=thread" ;;
    address) echo "-O1 -fsanitize=address,undefined -fno-sanitize-recover=all" ;;
    plain) echo "-O2" ;;
  esac
}

# What is different for tests that run for a moment, that is, all but
# *_simulation_test and *_threads_test: in the address build, it takes twice as
# long to optimize them as not to.
test_flags_of() {
  [[ "$1" != address ]] || echo "-O0"
}

simulation_percent_of() {
  case "${FULL:-0}.$1" in
    0.thread) echo 0.2 ;;
    0.address) echo 1 ;;
    0.plain) echo 10 ;;
    *.thread) echo 3 ;;
    *.address) echo 10 ;;
    *.plain) echo 100 ;;
  esac
}

# The tests of a build, those first that take longest to run or to compile, so
# that none of them is left for the end.
tests_of() {
  local name source
  if [[ ${#named_tests[@]} -gt 0 ]]; then
    printf '%s\n' "${named_tests[@]}"
    return
  fi
  for source in $(ls -S cc/engine/*_simulation_test.cc) $(ls -S cc/engine/*_threads_test.cc) \
    $(ls -S ${FOLDERS[@]/%//*_test.cc}); do
    name="$(basename "$source" .cc)"
    if [[ "$1" != plain ]] || grep -q simulation_length_testing.h "$source"; then
      echo "$name"
    fi
  done | awk '!seen[$0]++'
}

# Replaces the file by standard input if that differs, so that what depends on it
# is made again only then.
update() {
  cat > "$1.new"
  if cmp -s "$1.new" "$1"; then
    rm "$1.new"
  else
    mv "$1.new" "$1"
  fi
}

# Writes the Makefile of a build.
#
# Half of the time that compiling a small test takes goes into GoogleTest's
# headers, so they are compiled before, once for each build. (What a test forgets
# to include itself, the Bazel build finds.)
write_makefile() {
  local build="$1" source
  local folder="$ROOT/$build"
  local flags="-std=c++17 -g1 -fno-omit-frame-pointer -ffp-contract=off -pthread -Wall -Wextra -Werror"
  flags+=" $(flags_of "$build") -I. -isystem $include ${CXXFLAGS:-}"
  local test_flags
  test_flags="$flags $(test_flags_of "$build")"
  { echo "$CXX $test_flags" && $CXX --version; } | update "$folder/flags"
  echo "#include <gtest/gtest.h>" | update "$folder/precompiled.h"
  {
    echo "engine_$build :="
    for source in ${FOLDERS[@]/%//*.cc}; do
      [[ "$source" == *_test.cc ]] ||
        echo "engine_$build += $folder/$(basename "$source" .cc).o"
    done
    cat << END
SHELL := /bin/bash
vpath %.cc ${FOLDERS[*]}
$folder/precompiled.h.gch: $folder/precompiled.h $folder/flags
	@$CXX $test_flags -x c++-header \$< -o \$@
# make takes the rule whose pattern says most.
$folder/%.o: %.cc $folder/flags
	@$CXX $flags -MMD -MP -c \$< -o \$@
$folder/%_test.o: %_test.cc $folder/flags $folder/precompiled.h.gch
	@$CXX $test_flags -include $folder/precompiled.h -MMD -MP -c \$< -o \$@
$folder/%_simulation_test.o: %_simulation_test.cc $folder/flags
	@$CXX $flags -MMD -MP -c \$< -o \$@
$folder/%_threads_test.o: %_threads_test.cc $folder/flags
	@$CXX $flags -MMD -MP -c \$< -o \$@
$folder/%_test: $folder/%_test.o \$(engine_$build)
	@$CXX $flags \$^ -lgtest -lgtest_main -ldl -o \$@
# The exit status and the milliseconds. A test that fails is no error of make.
$folder/%.run: $folder/%
	@start=\$\${EPOCHREALTIME/[.,]/}; status=0; \\
	RECSYNC_SIMULATION_PERCENT=\$\${RECSYNC_SIMULATION_PERCENT:-$(simulation_percent_of "$build")} \\
	  \$< --gtest_color=no > \$<.log 2>&1 || status=\$\$?; \\
	echo \$\$status \$\$(((\$\${EPOCHREALTIME/[.,]/} - start) / 1000)) > \$@
.SECONDARY:
-include $folder/*.d
END
  } > "$folder/Makefile"
}

# The number in front of "tests" in GoogleTest's summary line of a kind.
count_of() {
  sed -n "s/^\[  $1 *\] \([0-9]*\) tests\{0,1\}\(\.\|, listed below:\)\$/\1/p" "$2" | head -n 1
}

declare -A tests
makefiles=()
for build in "${builds[@]}"; do
  mkdir -p "$ROOT/$build"
  rm -f "$ROOT/$build"/*.run
  write_makefile "$build"
  makefiles+=(-f "$ROOT/$build/Makefile")
  tests[$build]="$(tests_of "$build")"
done

# All builds together, test by test.
mapfile -t goals < <(for build in "${builds[@]}"; do
  awk -v build="$ROOT/$build" 'NF { print NR, build "/" $0 ".run" }' <<< "${tests[$build]}"
done | sort -n -s | cut -d ' ' -f 2)

export TSAN_OPTIONS="halt_on_error=0 second_deadlock_stack=1 ${TSAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1 ${UBSAN_OPTIONS:-}"
# What does not compile counts as a failure below; the rest is still run.
make --no-print-directory --output-sync -k -j"${JOBS:-$(nproc)}" "${makefiles[@]}" "${goals[@]}" ||
  true

all_passed=0
all_failed=0
times=""
for build in "${builds[@]}"; do
  passed=0
  failed=0
  files=0
  for name in ${tests[$build]}; do
    files=$((files + 1))
    log="$ROOT/$build/$name.log"
    if [[ ! -f "$ROOT/$build/$name.run" ]]; then
      echo "$build: $name was not built"
      failed=$((failed + 1))
      continue
    fi
    read -r status milliseconds < "$ROOT/$build/$name.run"
    times+="$milliseconds $build $name"$'\n'
    ok="$(count_of PASSED "$log")"
    bad="$(count_of FAILED "$log")"
    # A sanitizer's report fails a run in which every test passed, and a crash
    # leaves no summary at all.
    [[ $status -eq 0 || ${bad:-0} -gt 0 ]] || bad=1
    passed=$((passed + ${ok:-0}))
    failed=$((failed + ${bad:-0}))
    if [[ $status -ne 0 ]]; then
      echo "$build: $name failed with status $status; the end of $log:"
      tail -n 60 "$log"
    fi
  done
  if [[ $failed -eq 0 ]]; then
    echo "$build: ok, $passed tests in $files files passed"
  else
    echo "$build: FAILED, $passed tests passed, $failed failed"
  fi
  all_passed=$((all_passed + passed))
  all_failed=$((all_failed + failed))
done

echo "The longest to run:"
sort -rn <<< "$times" | awk 'NF && NR <= 10 { printf "%8.1f s  %s: %s\n", $1 / 1000, $2, $3 }'
echo "$all_passed passed, $all_failed failed"
[[ $all_failed -eq 0 && $all_passed -gt 0 ]]
