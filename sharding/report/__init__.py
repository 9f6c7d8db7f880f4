"""What a plan is predicted to take, told as text, HTML and figures."""
