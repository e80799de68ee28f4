"""What is known of every operator, for people: derived rules, tables, coverage."""
