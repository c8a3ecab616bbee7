"""The processes of a run: finds, joins, watches and stops them."""
