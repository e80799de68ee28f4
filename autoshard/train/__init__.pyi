from autoshard.train.config.train_config import TrainConfig
from autoshard.train.inference.exported_model import TextGenerator
from autoshard.train.inference.exported_model import open_generator
from autoshard.train.inference.trained_model import Trained
from autoshard.train.inference.trained_model import load_trained
from autoshard.train.run.loop import Result
from autoshard.train.run.loop import Trainer
from autoshard.train.run.loop import train

__all__ = [
    "Result",
    "TextGenerator",
    "TrainConfig",
    "Trained",
    "Trainer",
    "load_trained",
    "open_generator",
    "train",
]
