"""Which class a card belongs to, and what may be used on it. No card is needed: they say what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from nearfield.kernels import backends, cards

CARD = torch.device("cuda", 0)


@pytest.fixture
def a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Call it with the compute capability that the card is to have."""

    def of(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        forget()

    def forget() -> None:
        for cached in (cards.class_of, cards._starts_early):
            cached.cache_clear()

    monkeypatch.delenv(cards.SWITCH, raising=False)
    yield of
    forget()


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "8.0"),
        ((8, 6), "8.6"),
        ((8, 7), "8.6"),
        ((8, 9), "8.6"),
        ((9, 0), "9.0"),
        ((10, 0), "10.0"),
        ((10, 3), "10.0"),
        ((12, 0), "12.0"),
        ((12, 1), "12.0"),
    ],
)
def test_a_class_serves_its_capability_and_those_up_to_the_next(
    capability: tuple[int, int], name: str, a_card: Callable[[int, int], None]
) -> None:
    a_card(*capability)
    assert cards.class_of(CARD, "") == name


def test_without_a_card_there_is_a_class() -> None:
    assert cards.class_of(torch.device("cpu"), "") == "9.0"


@pytest.mark.parametrize(("capability", "served"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((12, 0), True)])
def test_which_cards_run_the_kernels(
    capability: tuple[int, int], served: bool, a_card: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_card(*capability)
    monkeypatch.setattr(backends, "HAS_TRITON", True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert backends.runs_triton(CARD) == served
    if served:
        backends.check_backend("triton", CARD)
    else:
        with pytest.raises(ValueError, match=r"compute capability 8.0 or later, got cuda:0; use backend='auto'"):
            backends.check_backend("triton", CARD)


@pytest.mark.parametrize(
    ("capability", "imposed", "dependent"),
    [
        ((8, 0), "", False),
        ((8, 9), "", False),
        ((9, 0), "", True),
        ((12, 0), "", True),
        ((9, 0), "8.6", False),
        ((9, 0), "12.0", True),
        ((8, 0), "12.0", False),
    ],
)
def test_dependent_launches_need_a_card_that_has_them(
    capability: tuple[int, int],
    imposed: str,
    dependent: bool,
    a_card: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An imposed class counts as well, so that a larger card does what one of the class would do."""
    a_card(*capability)
    monkeypatch.setenv(cards.SWITCH, imposed)
    assert cards.starts_early(CARD) == dependent


def test_a_class_is_imposed_where_there_is_room_for_it(a_card: Callable[[int, int], None]) -> None:
    a_card(9, 0)
    assert [cards.class_of(CARD, name) for name in cards.SHARED] == list(cards.SHARED)
    with pytest.raises(ValueError, match=r"NEARFIELD_TILES must be one of 8.0, 8.6, 9.0, 10.0, 12.0, got '8.9'"):
        cards.class_of(CARD, "8.9")
    a_card(8, 6)
    assert cards.class_of(CARD, "12.0") == "12.0"
    with pytest.raises(ValueError, match=r"'8.0' takes up to 166,912 bytes .* cuda:0 \(class 8.6\) has 101,376"):
        cards.class_of(CARD, "8.0")
