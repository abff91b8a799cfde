"""A soak that anybody can run: `python -m tests.faults.soak` makes a job while parts of the installation
are killed, frozen and fooled."""
