"""moored inside other trainers; each module needs the package it is named after."""
