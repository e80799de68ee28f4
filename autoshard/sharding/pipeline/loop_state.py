"""What the loop over the ticks of a pipeline carries, and which parts of a tick read or write it."""

from __future__ import annotations

from autoshard.sharding.pipeline.schedules import AFTER, BACKWARD, BEFORE, FORWARD, MIDDLE, RECOMPUTE, WEIGHTS

WAITING = {
    "residuals": (FORWARD, (BACKWARD, WEIGHTS)),
    "inputs": (FORWARD, (RECOMPUTE,)),
    "middle_stacks": (FORWARD, (MIDDLE,)),
    "outlet": (FORWARD, (MIDDLE,)),
    "for_weights": (BACKWARD, (WEIGHTS,)),
    "after_stacks": (BACKWARD, (AFTER,)),
}
"""Values that wait in slots: the part that makes them, and the parts that take them."""
USED_BY = {
    **{name: (made, *taken) for name, (made, taken) in WAITING.items()},
    "inlet": (BEFORE, FORWARD), "forward": (FORWARD,), "backward": (BACKWARD, AFTER), "forward_sums": (FORWARD,),
    "middle": (MIDDLE,), "backward_sums": (BACKWARD, WEIGHTS), "after": (AFTER,),
}  # fmt: skip
"""Entry of the state -> the parts that read or write it."""
