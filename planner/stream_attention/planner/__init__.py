"""The planner: from a described call to a chosen route, a bound plan and its one-shot forms."""
