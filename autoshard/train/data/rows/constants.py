"""Constants of instruction data."""

import datetime

TEMPLATE_DAY = datetime.datetime(2024, 7, 26)
"""The date that chat templates get which ask for it: that of Llama 3.1's template. A fixed date gives
a resumed run the same tokens."""
HELD_OUT_ONE_IN = 20
"""About one in this many rows is held out; chosen, as of the files of a text folder."""
PADDING = 0
"""Token and segment of positions without a document."""
