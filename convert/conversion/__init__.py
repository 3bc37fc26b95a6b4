"""From a head, a target and a vocabulary to written artifacts."""
