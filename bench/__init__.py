"""What measures. Every figure that the project claims comes from here, with the command, the machine and the commit."""
