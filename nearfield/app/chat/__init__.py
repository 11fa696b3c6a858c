"""Questions about documents: `documents` (their tokens and passages), `kept` (what a model keeps of them, and where),
`words` (tokens as text, while they come), `engine` (a prompt and its answer), `terminal` (`nearfield chat`).
"""
