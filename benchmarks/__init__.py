"""One script per question: see README.md beside them. They are no part of the package."""
