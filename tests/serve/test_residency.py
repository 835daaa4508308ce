"""Which models make room: rules on sizes and times alone."""

from bytetx.serve.residency import Place, Residency, State


def places(*sizes: int, budget: int | None, unload_after_s: float | None = None) -> Residency:
    """Models a, b, ... in memory, a unused for longest."""
    made = [
        Place(chr(ord("a") + i), size, State.IN, last_used=float(i)) for i, size in enumerate(sizes)
    ]
    return Residency(made, budget_bytes=budget, unload_after_s=unload_after_s)


def chosen(residency: Residency, place: Place) -> list[str] | None:
    found = residency.make_room(place)
    return None if found is None else [one.name for one in found]


def with_new(residency: Residency, num_bytes: int) -> tuple[Residency, Place]:
    """The same models and one that is out."""
    new = Place("new", num_bytes)
    return Residency([*residency._places, new], budget_bytes=residency.budget_bytes), new


def test_no_budget_has_room_for_all() -> None:
    residency, new = with_new(places(10, 10, budget=None), 1000)
    assert chosen(residency, new) == [] and residency.fits_alone(new)
    assert residency.held_bytes == 20


def test_the_longest_unused_makes_room() -> None:
    residency, new = with_new(places(10, 10, 10, budget=40), 10)
    assert chosen(residency, new) == []
    residency, new = with_new(places(10, 10, 10, budget=30), 10)
    assert chosen(residency, new) == ["a"]
    residency, new = with_new(places(10, 10, 10, budget=30), 20)
    assert chosen(residency, new) == ["a", "b"]


def test_as_few_as_will_do() -> None:
    """b alone frees enough, and a, which is small and was not used for longer, stays."""
    residency, new = with_new(places(2, 20, 10, budget=32), 20)
    assert chosen(residency, new) == ["b"]


def test_idle_models_go_before_used_ones() -> None:
    residency, new = with_new(places(10, 10, 10, budget=30), 10)
    residency._places[0].num_running = 1
    assert chosen(residency, new) == ["b"]
    residency, new = with_new(places(10, 10, budget=20), 20)
    residency._places[0].num_running = 1
    assert chosen(residency, new) == ["b", "a"]


def test_models_that_move_already_are_not_chosen() -> None:
    residency, new = with_new(places(10, 10, budget=20), 10)
    residency._places[0].state = State.LEAVING
    assert chosen(residency, new) == ["b"]
    residency._places[1].state = State.LOADING
    assert chosen(residency, new) is None


def test_a_model_above_the_budget_finds_no_room() -> None:
    residency, new = with_new(places(10, 10, budget=20), 21)
    assert chosen(residency, new) is None and not residency.fits_alone(new)


def test_a_model_that_is_larger_than_expected_pushes_others_out() -> None:
    residency = places(10, 10, budget=25)
    newest = residency._places[1]
    assert chosen(residency, newest) == []
    newest.num_bytes = 20
    assert chosen(residency, newest) == ["a"]
    newest.num_bytes = 30
    assert chosen(residency, newest) is None


def test_idle_models_expire() -> None:
    residency = places(1, 1, 1, budget=None, unload_after_s=10.0)
    assert residency.next_expiry() == 10.0
    assert [one.name for one in residency.expired(9.9)] == []
    assert [one.name for one in residency.expired(11.0)] == ["a", "b"]
    residency._places[0].num_running = 1
    assert [one.name for one in residency.expired(11.0)] == ["b"]
    assert residency.next_expiry() == 11.0
    for one in residency._places:
        one.state = State.OUT
    assert residency.next_expiry() is None and residency.expired(100.0) == []
    assert places(1, budget=None).next_expiry() is None
