"""What watches over a job from outside: starting it, ending all of it, and starting it again."""
