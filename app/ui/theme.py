"""Colours and type of the page: paper and ink by day, the reverse by night. Only fonts that the machine has."""

from __future__ import annotations

import gradio as gr

_SANS = ("Inter", "system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "DejaVu Sans", "sans-serif")
_MONO = ("ui-monospace", "SF Mono", "Cascadia Mono", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")

# name: (light, dark). style.css uses the same names through the library's variables.
_COLOURS = {
    "body_background_fill": ("#faf8f4", "#181715"),
    "background_fill_primary": ("#ffffff", "#211f1c"),
    "background_fill_secondary": ("#f2efe8", "#2a2824"),
    "body_text_color": ("#25221d", "#e9e5dc"),
    "body_text_color_subdued": ("#6b655a", "#a39c8f"),
    "border_color_primary": ("#e2ddd2", "#38352f"),
    "border_color_accent": ("#2e6b5b", "#7fbda9"),
    "slider_color": ("#2e6b5b", "#7fbda9"),
    "color_accent_soft": ("#e4efea", "#22332d"),
    "link_text_color": ("#2e6b5b", "#8cc9b5"),
    "link_text_color_hover": ("#1f4e42", "#a9dccb"),
    "link_text_color_visited": ("#2e6b5b", "#8cc9b5"),
    "link_text_color_active": ("#1f4e42", "#a9dccb"),
    "code_background_fill": ("#f2efe8", "#2a2824"),
    "block_background_fill": ("#ffffff", "#211f1c"),
    "input_background_fill": ("#ffffff", "#211f1c"),
    "input_placeholder_color": ("#857e71", "#8b8477"),
    "button_primary_background_fill": ("#2e6b5b", "#7fbda9"),
    "button_primary_background_fill_hover": ("#387c6a", "#93cdb9"),
    "button_primary_border_color": ("#2e6b5b", "#7fbda9"),
    "button_primary_border_color_hover": ("#387c6a", "#93cdb9"),
    "button_primary_text_color": ("#faf8f4", "#181715"),
    "button_secondary_background_fill": ("#ffffff", "#211f1c"),
    "button_secondary_background_fill_hover": ("#f2efe8", "#2a2824"),
    "button_secondary_border_color": ("#e2ddd2", "#38352f"),
    "button_secondary_text_color": ("#25221d", "#e9e5dc"),
    "error_text_color": ("#a3352b", "#f0a097"),
    "error_background_fill": ("#fbeceb", "#3a2321"),
    "error_border_color": ("#eac4c0", "#5c3430"),
}


def theme() -> gr.themes.Base:
    """The page's theme."""
    colours = {}
    for name, (light, dark) in _COLOURS.items():
        colours[name] = light
        colours[f"{name}_dark"] = dark
    return gr.themes.Base(
        primary_hue=gr.themes.colors.emerald,
        neutral_hue=gr.themes.colors.stone,
        font=_SANS,
        font_mono=_MONO,
    ).set(**colours, button_border_width="1px", button_small_radius="0.6rem", button_small_padding="0.5rem 1rem")
