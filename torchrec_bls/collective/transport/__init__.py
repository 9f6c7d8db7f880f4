"""What a channel's messages travel by, and how its ranks set it up."""
