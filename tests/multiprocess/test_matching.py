"""Which calls of several processes belong together, decided without processes."""

import itertools
import random
from collections.abc import Sequence

import pytest

from eqx_ckpt._distributed.call_matching import Call, Calls


pytestmark = pytest.mark.once


LATE = {"error": {"kind": "X", "text": "late", "errno": None}}


class Job:
    """Process 0 decides; the calls of the others arrive as they are told to."""

    def __init__(self, processes: int = 2) -> None:
        self.calls = Calls(0, range(1, processes))
        self.numbers = [itertools.count(1) for _ in range(processes)]

    def call(self, process: int, text: str, life: int = 1) -> Call:
        call = Call(
            process, (life, next(self.numbers[process])), text, f"{text} of {process}"
        )
        (self.calls.arrived if process else self.calls.open)(call)
        self.calls.settle()
        return call


def words(call: Call) -> str:
    """What became of a call."""
    if call.partners is not None:
        return "matched"
    return call.answer["error"]["text"] if call.answer else "waits"


def both(job: Job, text: str, processes: int = 2) -> str:
    """What becomes of the same call, made by all of them."""
    others = [job.call(i, text) for i in range(1, processes)]
    mine = job.call(0, text)
    found = [partner.process for partner in mine.partners or ()]
    assert found == ([call.process for call in others] if mine.partners else [])
    return words(mine)


@pytest.mark.parametrize("extra", ["latest() in 'a'", "should_save(2)", "restore(a)"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_call_of_one_process_is_named_and_the_save_works(who, extra):
    job = Job()
    common = job.call(1 - who, "save(3)")
    wrong = job.call(who, extra)
    for line in (f"process {who}: {extra}", f"process {1 - who}: save(3)"):
        assert f"\n- {line}\n" in words(wrong)
    assert words(common) == "waits"
    now = job.call(who, "save(3)")
    assert words(now if who == 0 else common) == "matched"
    assert both(job, "should_save(4)") == "matched"


@pytest.mark.parametrize("who", [0, 1])
def test_one_process_is_a_step_ahead(who):
    """Both fail, who is behind once more; then they are in step again."""
    job = Job()
    ahead, behind = job.call(who, "save(2)"), job.call(1 - who, "save(1)")
    assert words(ahead) == words(behind) != "waits"
    late, next_one = job.call(1 - who, "save(2)"), job.call(who, "save(3)")
    assert words(late) == words(ahead)
    assert words(next_one) == "waits"
    last = job.call(1 - who, "save(3)")
    assert words(next_one if who == 0 else last) == "matched"
    assert both(job, "save(4)") == "matched"


def test_a_save_that_the_others_do_not_know():
    """It gets in the way of one call only."""
    job = Job()
    save, asked = job.call(0, "save(3)"), job.call(1, "should_save(3)")
    assert "process 0: save(3)" in words(asked)
    assert words(save) == "waits"
    job.call(1, "should_save(4)")
    assert "process 1: should_save(4)" in words(save)
    assert words(job.call(0, "should_save(4)")) == "matched"


def test_who_comes_too_late_is_told_at_once():
    """Whoever gave up; and then all are in step."""
    job = Job()
    job.calls.fail(job.call(0, "save(1)"), LATE)
    assert words(job.call(1, "save(1)")) == "late"
    assert both(job, "save(2)") == "matched"

    job = Job(3)
    job.calls.withdrawn(job.call(1, "save(3)"), LATE)
    assert words(job.call(2, "save(3)")) == words(job.call(0, "save(3)")) == "late"
    assert both(job, "save(4)", 3) == "matched"


def test_who_was_there_with_another_call_is_not_late():
    job = Job(3)
    lost = [job.call(i, "latest()") for i in (1, 2)]
    survivor = job.call(0, "should_save(1)")
    assert [words(call) != "waits" for call in (*lost, survivor)] == [True, True, False]
    job.calls.fail(survivor, LATE)
    assert both(job, "latest()", 3) == "matched"


def test_the_same_call_again_after_a_late_one():
    """The late process fails the first one too; all of them make the second one."""
    job = Job(3)
    job.calls.fail(job.call(0, "restore(a)"), LATE)
    again = job.call(0, "restore(a)")
    late = [job.call(i, "restore(a)") for i in (1, 2)]
    assert [words(call) for call in late] == ["late"] * 2
    assert words(again) == "waits"
    assert [words(job.call(i, "restore(a)")) for i in (1, 2)] == ["waits"] * 2
    assert words(again) == "matched"


def test_a_failure_before_a_match_does_not_answer_a_call_after_it():
    job = Job()
    job.calls.fail(job.call(0, "latest()"), LATE)
    assert both(job, "save(2)") == "matched"
    job.call(0, "save(3)")
    assert "process 0: save(3)" in words(job.call(1, "latest()"))

    job = Job()
    job.calls.withdrawn(job.call(1, "latest()"), LATE)
    assert both(job, "save(2)") == "matched"
    job.call(1, "save(3)")
    assert "process 1: save(3)" in words(job.call(0, "latest()"))


def test_who_was_told_of_a_failure_is_not_told_again():
    job = Job(3)
    told = job.call(1, "latest()")
    job.call(0, "latest()")
    job.call(2, "save(3)")
    assert words(told) != "waits"
    mine = job.call(0, "save(3)")
    assert words(job.call(1, "latest()")) == "waits"
    # It has been preferred once.
    assert "process 1: latest()" in words(mine)


def test_who_gave_up_first_is_not_told_of_that():
    job = Job()
    job.calls.withdrawn(job.call(1, "latest()"), LATE)
    job.call(1, "save(2)")
    assert words(job.call(0, "latest()")) == "late"
    assert "process 1: save(2)" in words(job.call(0, "save(9)"))
    job.call(0, "save(10)")
    assert "process 0: save(10)" in words(job.call(1, "latest()"))


def test_of_two_saves_that_exclude_each_other_none_survives_twice():
    """Who has been preferred once is given up the next time."""
    job = Job()
    mine = job.call(0, "save(3)")
    assert words(job.call(1, "latest()")) != "waits"
    theirs = job.call(1, "should_save(3)")
    assert words(mine) != "waits"
    assert words(theirs) == "waits"
    job = Job()
    theirs = job.call(1, "save(3)")
    assert words(job.call(0, "latest()")) != "waits"
    mine = job.call(0, "should_save(3)")
    assert words(theirs) != "waits"
    assert words(mine) == "waits"


def test_what_a_dead_process_has_called_is_forgotten():
    job = Job()
    job.call(1, "save(3)")
    new = job.call(1, "restore()", life=2)
    mine = job.call(0, "restore()")
    assert mine.partners == [new]
    assert words(job.call(0, "save(3)")) == "waits"


def test_several_saves_at_once():
    job = Job()
    mine = [job.call(0, f"save(a{i})") for i in range(3)]
    for i in range(3):
        job.call(1, f"save(a{i})")
    assert [words(call) for call in mine] == ["matched"] * 3


def test_one_of_three_is_out_of_order():
    job = Job(3)
    second, third = job.call(1, "save(3)"), job.call(2, "latest()")
    mine = job.call(0, "save(3)")
    assert [words(call) for call in (second, mine)] == ["waits", "waits"]
    for line in ("process 0: save(3)", "process 1: save(3)", "process 2: latest()"):
        assert f"\n- {line}\n" in words(third)
    job.call(2, "save(3)")
    assert words(mine) == "matched"


def test_all_partners_of_a_call_that_fails_are_told():
    job = Job(3)
    second = job.call(1, "latest()")
    mine, third = job.call(0, "latest()"), job.call(2, "save(3)")
    assert words(mine) == words(second) != "waits"
    assert words(third) == "waits"
    assert both(Job(3), "latest()", 3) == "matched"


def play(programs: Sequence[Sequence[str]], late: set[int], seed: int) -> list[str]:
    """What becomes of the calls that processes make one after the other.

    They come in a random order. Those in `late` stop waiting for their first call.
    """
    job, choose = Job(len(programs)), random.Random(seed).choice
    todo = [list(program) for program in programs]
    waiting: dict[int, Call] = {}
    ends, matched = [""] * len(programs), list[Call]()
    while True:
        matched += [p for c in waiting.values() for p in c.partners or ()]
        for who, call in list(waiting.items()):
            if words(call) != "waits" or call in matched:
                ends[who] += "x" if call.answer else "."
                del waiting[who]
        ready = [who for who, calls in enumerate(todo) if calls and who not in waiting]
        giving_up = [who for who in late if who in waiting and not ends[who]]
        if not ready and not giving_up:
            return ends
        who = choose([*ready, *giving_up])
        if who in ready:
            waiting[who] = job.call(who, todo[who].pop(0))
        elif who == 0:
            job.calls.fail(waiting[0], LATE)
            job.calls.settle()
        else:
            job.calls.withdrawn(waiting[who], LATE)
            waiting[who].answer = LATE
            job.calls.settle()


TAIL = ["save(20)", "save(21)", "save(22)"]


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_after_one_disagreement_the_next_call_works(processes: int) -> None:
    """Each makes some call, of which not all are equal; then all make the same."""
    words = ["save(10)", "save(11)", "latest()", "should_save(1)", "restore(a)"]
    for seed in range(300):
        chosen = random.Random(seed).choices(words, k=processes)
        if len(set(chosen)) > 1:
            ends = play([[text, *TAIL] for text in chosen], set(), seed)
            assert ends == ["x..."] * processes, (seed, chosen)


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_after_many_disagreements_the_next_call_works(processes: int) -> None:
    """Each makes calls of its own, of any kind; then all make the same."""
    words = ["save(1)", "latest()", "should_save(1)", "restore(a)", "copy(a)"]
    for seed in range(200):
        chance = random.Random(seed)
        count = chance.randrange(1, 5)
        programs = [
            [f"{text} of {i}" for text in chance.choices(words, k=count)] + TAIL
            for i in range(processes)
        ]
        ends = play(programs, set(), seed)
        assert ends == ["x" * count + "..."] * processes, (seed, programs)


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_after_a_late_call_the_next_call_works(processes: int) -> None:
    """Some give up before another comes, with the same call or with another one."""
    for seed in range(300):
        chance = random.Random(seed)
        late = set(chance.sample(range(processes), chance.randrange(1, processes)))
        chosen = chance.choices(["save(10)", "save(11)"], [3, 1], k=processes)
        ends = play([[text, *TAIL] for text in chosen], late, seed)
        # Three faults at once, two late processes and another call, may cost two.
        known = 1 if len(set(chosen)) == 1 or len(late) == 1 else 2
        assert {end[known:] for end in ends} == {"...."[known:]}, (seed, chosen, late)
        assert len({end[0] for end in ends}) == 1, (seed, chosen, late)


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_a_process_that_is_ahead_or_makes_one_call_more(processes: int) -> None:
    """A query that only one makes costs that one alone; a step, one more of each."""
    tail = [f"save({n})" for n in range(10, 20)]
    for seed in range(100):
        chance = random.Random(seed)
        programs = [list(tail) for _ in range(processes)]
        who, at = chance.randrange(processes), chance.randrange(5)
        programs[who].insert(at, "latest()")
        ends = play(programs, set(), seed)
        assert ends[who].replace("x", "", 1) == "." * 10, (seed, who, at)
        assert {end for i, end in enumerate(ends) if i != who} == {"." * 10}
        programs = [tail[chance.randrange(processes) :] for _ in range(processes)]
        ends = play(programs, set(), seed)
        # At most so many steps fail on the one that is ahead of all.
        assert min(end.count("x") for end in ends) < processes, (seed, ends)
        assert len({end[-5:] for end in ends}) == 1
        assert all("x" not in end.lstrip("x") for end in ends)
