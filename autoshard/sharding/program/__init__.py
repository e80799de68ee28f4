"""The user's function traced once, and what is known of its operators."""
