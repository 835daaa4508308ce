"""HTTP server: TEI's, OpenAI's and Cohere's routes on top of AsyncModel (`bytetx serve`)."""
