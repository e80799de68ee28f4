"""Text from a run that started from a pretrained folder: a sample at its end, and `generate` with its adapters."""

from collections.abc import Callable
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.models.adapters import LoraConfig
from autoshard.train.config.pretrained_config import PretrainedConfig
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.run.loop import train
from tests.train.data.rows.templates import make_chat_folder
from tests.train.data.rows.test_row_source import ROWS, write_rows

LORA = LoraConfig(rank=2, alpha=64, targets=("attention/*", "mlp/*"), dora=True)


@pytest.mark.slow
def test_a_run_draws_a_sample_and_generates_what_its_merged_model_does(
    make_config: Callable[..., TrainConfig], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder, data = make_chat_folder(tmp_path / "model"), write_rows(tmp_path / "rows.jsonl", ROWS)
    config = make_config(
        pretrained=PretrainedConfig(folder), data=str(data), lora=LORA, sample_tokens=5, prompt="hi", steps=3
    )
    run_dir = train(config).run_dir
    text = (run_dir / "sample.txt").read_text()
    assert text.startswith("hi ") and f"Sample:\n{text}" in capsys.readouterr().out
    assert main(["ckpt", "export", str(run_dir), str(tmp_path / "merged"), "--merge"]) == 0
    capsys.readouterr()
    texts = []
    for place in (folder, tmp_path / "merged", run_dir):
        options = ["--prompt", "hi why", "--chat", "--tokens", "12", "--length", "32"]
        assert main(["generate", str(place), *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[1] == texts[2] != texts[0]
    (tmp_path / "in.jsonl").write_text('{"prompt": "hi why"}\n')
    files = ["--file", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl"), "--length", "32"]
    assert main(["generate", str(run_dir), *files, "--tokens", "3"]) == 0
    capsys.readouterr()
    assert main(["generate", str(folder), *files, "--tokens", "3"]) == 2
    assert "of another model" in capsys.readouterr().err
    assert main(["generate", str(run_dir), "--model", "a:b"]) == 2
    assert "--model is for runs whose model a factory makes" in capsys.readouterr().err
    assert main(["generate", str(run_dir), "--step", "2"]) == 2
    assert "step 2" in capsys.readouterr().err


@pytest.mark.slow
def test_a_prompt_without_a_token_is_the_reason_for_no_sample(
    make_config: Callable[..., TrainConfig], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder, data = make_chat_folder(tmp_path / "model"), write_rows(tmp_path / "rows.jsonl", ROWS)
    config = make_config(pretrained=PretrainedConfig(folder), data=str(data), sample_tokens=5, prompt="\n", steps=3)
    assert train(config).step == 3
    assert "No sample: the prompt is empty" in capsys.readouterr().out
