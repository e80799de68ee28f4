"""Bad steps inside the window of a trace."""

from collections.abc import Callable

import pytest

from autoshard.train.config.train_config import TrainConfig
from autoshard.train.profile.comparison import compare_trace, read_names
from autoshard.train.step.guard import GuardConfig
from tests.train.run.incidents.test_incidents import CONSTANT, lines, no_number, run


@pytest.mark.slow
@pytest.mark.parametrize("reaction", ["rollback", pytest.param("skip", marks=pytest.mark.slow)])
def test_the_window_is_recorded_once(make_config: Callable[..., TrainConfig], reaction, capsys) -> None:
    shape = dict(checkpoint_every=2, log_every=100, optimizer=CONSTANT, guard=GuardConfig(reaction))
    config = make_config(steps=7, profile="2:5", **shape)
    run(config, {3: no_number})
    assert config.run_dir is not None
    first = 3 if reaction == "rollback" else 2  # the rollback restores step 2
    assert read_names(config.run_dir)["steps"] == [*range(first, 6)]
    assert len(list(config.run_dir.glob("profile/plugins/profile/*"))) == 1
    found = compare_trace(config.run_dir)
    assert found.step_us is not None and not [note for note in found.notes if "compiled again" in note]
    said = "the run was rolled back in steps 2 to 5 of --profile: the trace begins again at step 3"
    assert (said in capsys.readouterr().out) == (reaction == "rollback")
    assert ("seconds_lost" in lines(config)[-1]) == (reaction == "rollback")
