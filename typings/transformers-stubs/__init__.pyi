# Types of transformers are read from its modules, which is where our code imports from. Its own `__init__` has the names of 500 models:
# pyright would read every one of them. What is imported from here is an error.
