"""The mark `cases`, which says of a test's cases which of them a check of each change needs."""

import pathlib

import pytest

pytest_plugins = ["pytester"]

CONFTEST = pathlib.Path(__file__).with_name("conftest.py").read_text()
TESTS = """
    import pytest

    @pytest.mark.cases({names})
    @pytest.mark.parametrize("mode", ["async", "GBA", "Hop"])
    def test_modes(mode):
        pass

    @pytest.mark.full
    def test_another_combination():
        pass

    def test_alone():
        pass
"""


@pytest.fixture
def collect(pytester):
    """Gives what pytest collects of `TESTS` with these arguments, and its exit status."""

    def collect(*arguments, names='"Hop", "async"'):
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(test_some=TESTS.format(names=names))
        result = pytester.runpytest_inprocess("--collect-only", "-q", *arguments)
        found = [line.partition("::")[2] for line in result.outlines if "::test" in line]
        return found, result

    return collect


def test_cases_that_are_not_named_are_left_out_as_what_is_full(collect):
    found, _ = collect("-m", "not full")
    assert found == ["test_modes[async]", "test_modes[Hop]", "test_alone"]


def test_all_cases_are_there_when_nothing_is_left_out(collect):
    found, _ = collect()
    modes = [f"test_modes[{mode}]" for mode in ("async", "GBA", "Hop")]
    assert found == [*modes, "test_another_combination", "test_alone"]


def test_a_name_without_a_case_is_an_error(collect):
    _, result = collect(names='"Hop", "BSP"')
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    message = "`pytest.mark.cases` names what is no case: test_some.py::test_modes: ['BSP']"
    assert message in result.stderr.str()


def test_one_case_can_be_asked_for_by_its_id(collect):
    found, _ = collect("test_some.py::test_modes[async]")
    assert found == ["test_modes[async]"]
