"""Files of a batch job: records read from inputs, results written so that a killed job resumes."""
