"""`python -m worker`: starts the engine's process if the parent process asks for it, then runs the commands of
`worker.cli`."""

from jobs.engine_process import start_spare

if __name__ == "__main__":
    # Before the imports of the commands, since both take seconds.
    start_spare()
    from worker.cli import main

    main()
