"""The options of `autoshard plan`: those for named models, and when a plan is compiled."""
