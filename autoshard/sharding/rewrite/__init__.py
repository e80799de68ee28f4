"""Rewrites the traced step: pairs its passes, recognises operators by dataflow, and proves each replacement."""
