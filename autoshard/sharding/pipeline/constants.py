"""Constants of the choice of pipelines."""

LEAST_MICROBATCHES = 2
"""Microbatches for each stage, of the first pipeline that the search tries by itself. With fewer, stages of `1f1b` are
idle in more than a third of the ticks. Chosen."""

MOST_MICROBATCHES = 16
"""Microbatches for each stage, with which the search estimates the least idle time of a pipeline. Chosen: stages are
then idle in 6 % of the ticks, and more microbatches would make their products small."""

MOST_STAGE_COUNTS = 4
"""Numbers of stages that the search tries, from the smallest divisor of the number of devices on, if a schedule is
requested on a machine without slow links. More stages are idle for longer. Chosen."""
