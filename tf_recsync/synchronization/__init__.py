"""How trainers and parameter servers exchange parameters and gradients."""
