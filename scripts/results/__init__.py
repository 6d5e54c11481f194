"""The papers' figures, simulated: a module for each paper, or for one of its questions."""
