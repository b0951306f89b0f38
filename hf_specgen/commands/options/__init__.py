"""What each command takes, one file each, with its help. Loads neither torch nor models, so help comes at once."""
