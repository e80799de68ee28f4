"""Constants of a run's page."""

BUCKETS = 250  # parts of a curve, each drawn by at most four points; chosen: a chart is at most 1,150 pixels wide
SMOOTHED = 40  # a curve of at least this many values gets a moving average over a twentieth of them; chosen
LOG_RATIO = 10.0  # a curve whose largest value is this many times its median has a logarithmic scale; chosen
CHECKPOINTS_SHOWN = 20  # checkpoints that are shown at first; the others are folded; chosen
CHECKPOINTS_LISTED = 200  # checkpoints in the page, which bounds its size; chosen
INCIDENTS_SHOWN = 20  # incidents that are shown at first; the others are folded; chosen
INCIDENTS_LISTED = 500  # incidents in the page, which bounds its size; chosen
EVALUATIONS_LISTED = 200  # evaluations in the page, which bounds its size; chosen
MARKS_DRAWN = 100  # incidents that are lines in the charts; chosen
OTHER_CHARTS = 12  # metrics without a place of their own that are drawn; chosen
REASON_SHOWN = 160  # characters of a reason that are not folded; chosen
REASON_LENGTH = 2000  # characters of the reason of an attempt's end that are shown; chosen
