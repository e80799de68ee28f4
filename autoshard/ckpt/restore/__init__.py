"""Reading, checking, describing and comparing steps."""
