"""The table of commands, and what all of them share: words, help, pictures, completion."""
