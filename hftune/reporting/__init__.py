"""What a person reads about a run: reports and model cards, made from the files of its output folder."""
