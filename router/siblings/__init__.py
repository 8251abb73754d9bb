"""Routers of one fleet (processes of a machine, replicas): they tell each other their load and what they placed,
and a cold one what its ranks hold."""
