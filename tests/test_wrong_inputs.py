"""Each wrong input gets one clear message."""

from __future__ import annotations

import pytest

from tests.wrong_inputs import ROWS, WrongInput, message_of

LONGEST = 700  # characters: one paragraph, with the names of all workloads
LINES = 5  # of a message that lists differences


@pytest.mark.parametrize("wrong", ROWS, ids=[wrong.text for wrong in ROWS])
def test_a_wrong_input_is_explained(wrong: WrongInput) -> None:
    message = message_of(wrong)
    assert message != "nothing" and not message.startswith("not ours")
    assert all(word in message for word in wrong.words), message
    assert len(message) <= LONGEST and message.count("\n") < LINES, message
    assert "Traceback" not in message


def test_there_are_sixty_wrong_inputs() -> None:
    assert len(ROWS) >= 60 and len({wrong.text for wrong in ROWS}) == len(ROWS)
