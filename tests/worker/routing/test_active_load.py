"""Load between reports: prefill tokens until the first token, decode blocks until the end [Y12]."""

from pdcluster_worker.routing.active_load import ActiveLoad, Charges

NOTHING = Charges()


def test_y12_prefill_tokens_are_charged_until_the_first_token_and_blocks_until_free() -> None:
    load, report, charges = ActiveLoad(), object(), Charges(1, 100, 7)
    load.add("r", "d0", report, charges)
    assert load.potential("d0", report, NOTHING) == Charges(1, 100, 7)

    for _ in range(2):
        load.prefilled("r")
        assert load.potential("d0", report, NOTHING) == Charges(1, 0, 7)
    for _ in range(2):
        load.free("r")
        assert load.potential("d0", report, NOTHING) == NOTHING
    load.prefilled("r")  # unknown by now
    assert (load.num_requests("d0"), charges) == (0, Charges(1, 100, 7))


def test_y12_a_request_that_ends_without_a_token_is_not_charged_any_more() -> None:
    load, report = ActiveLoad(), object()
    load.add("r", "d0", report, Charges(1, 100, 7))
    load.free("r")

    assert load.potential("d0", report, NOTHING) == NOTHING


def test_what_was_sent_since_a_report_comes_on_top_of_it_and_what_ended_is_taken_off() -> None:
    load, old, new = ActiveLoad(), object(), object()
    load.add("a", "d0", old, Charges(1, 100, 7))
    assert load.potential("d0", old, Charges(5, 50, 20)) == Charges(6, 150, 27)
    assert load.potential("d0", new, Charges(6, 150, 27)) == Charges(6, 150, 27)

    load.add("b", "d0", new, Charges(1, 10, 1))
    assert load.potential("d0", new, Charges(6, 150, 27)) == Charges(7, 160, 28)
    load.free("a")
    assert load.potential("d0", new, Charges(5, 0, 0)) == Charges(5, 10, 1)


def test_load_is_never_less_than_what_was_sent() -> None:
    load = ActiveLoad()
    for name in "abc":
        load.add(name, "d0", None, Charges(1, 100, 7))

    assert load.potential("d0", object(), Charges(1, 20, 0)) == Charges(3, 300, 21)


def test_request_that_goes_elsewhere_is_charged_there_alone() -> None:
    load, report = ActiveLoad(), object()
    for worker in ("d0", "d1"):
        load.add("r", worker, report, Charges(1, 100, 7))

    assert (load.num_requests("d0"), load.num_requests("d1")) == (0, 1)
    assert load.potential("d0", report, NOTHING) == NOTHING
