"""Self-contained HTML pages: their parts, style and security policy. It knows no plan and no run."""
