"""The format on disk, as readers of any head need it: names of files, checksums, manifest."""
