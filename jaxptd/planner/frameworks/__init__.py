"""Other training frameworks: their fastest layouts, as they run them, in their own words.

framework.py is the interface; each framework is one file. search.py ranks layouts, memory.py is the
formula for memory, and planning.py makes the table and the config.
"""
