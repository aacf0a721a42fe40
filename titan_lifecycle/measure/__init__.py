"""What a step costs: collectives, memory and time."""
