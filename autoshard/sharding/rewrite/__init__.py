"""Rewrites the traced step soundly: pairs its forward and backward passes, recognises operators, proves replacements."""
