"""`nearfield serve`: `body` (what a request may say), `turns` (one answer at a time), `asgi` (paths and answers), `command`,
and `page/` (the one page: HTML, CSS and JavaScript).
"""
