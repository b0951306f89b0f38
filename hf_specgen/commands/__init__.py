"""What the scripts run. The top room: only a command may import `trainers`, inside the function that needs it."""
