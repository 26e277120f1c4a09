"""Small wrongs for the sources of the rotations' kernels."""

from __future__ import annotations

WRONGS: dict[str, dict[str, tuple[str, str]]] = {
    "rope": {
        "the sine's sign": ("ahead = x[j] * c[j] - y[j] * s[j];", "ahead = x[j] * c[j] + y[j] * s[j];"),
        "the first of the pair twice": ("behind = y[j] * c[j] + x[j] * s[j];", "behind = x[j] * c[j] + x[j] * s[j];"),
        "fuse the other product": ("vt_fma(x[j], s[j], y[j] * c[j])", "vt_fma(y[j], c[j], x[j] * s[j])"),
        "products never rounded": ("through(x[j] * c[j], product)", "(x[j] * c[j])"),
        "pairs of halves always": ("u.first + (flags & GPTJ ? V : half)", "u.first + half"),
        "pairs stay apart": ("        a[2 * j] = x[j];\n", ""),
        "copied lanes from the front": ("lane < offset ? lane : lane + 2 * half", "lane"),
        "never inverse": ("for (int j = 0; j < V; ++j) s[j] = -s[j];", ""),
        "time ends late": ("return i < first_bound ? 0", "return i <= first_bound ? 0"),
        "height ends early": ("turn == 1 && i <= first_bound", "turn == 1 && i + 3 <= first_bound"),
        "the time's row for all": ("if (axis_of(u.pair + j,", "if (true || axis_of(u.pair + j,"),
        "a head less": ("(PAGED ? rope.v.count : 0));", "(PAGED ? rope.v.count : 0)) - 1;"),
        "angles in float32": ("(double)position * inv", "(double)((float)position * (float)inv)"),
        "no quarter turns": ("cos = odd ? s : c;", "cos = c;"),
        "near angles alone": ("two_over_pi + word", "two_over_pi"),
        "do not wait for the angles": ("    __syncthreads();\n    if (!inside) return;", "    if (!inside) return;"),
        "cosines for sines": ("    s = (float)sin;", "    s = (float)cos;"),
    },
    "rope_fused": {
        "Gemma's weight without one": ("(flags & GEMMA ? w[j] + 1.0f : w[j])", "w[j]"),
        "never round the norm": ("if (flags & ROUNDED) v[j] = through(v[j], part.kind);", ""),
        "always round the norm": ("if (flags & ROUNDED)", "if (true)"),
        "sum for mean": ("tree_of_lanes(partial, lanes), (float)front.width", "tree_of_lanes(partial, lanes), 0.0f"),
        "a term less": ("        add_squares(partial, v);\n", ""),
        "one weight": ("k_out_token, k_weight", "k_out_token, q_weight"),
        "partners within the head's half": ("return lane < table.half ? lane + table.half : lane - table.half;",
                                            "return lane ^ 8;"),
        "pairs in GPT-J's order backwards": ("(lane + j) & 1 ? one_s[0] : -one_s[0]",
                                             "(lane + j) & 1 ? -one_s[0] : one_s[0]"),
        "the token's row of the table": ("positions == nullptr ? token : id_at(positions, token, wide)", "token"),
        "eight partials are one": ("add_squares(p[w], x);", "add_squares(p[0], x);"),
        "v is rotated too": ("if (u.rotates && !moved)", "if (u.rotates)"),
        "the first slot for all": ("slots[at.token]", "slots[0]"),
        "padding is stored": ("at.token < stored ? slots[at.token] : -1", "slots[at.token < stored ? at.token : 0]"),
        "every page's first row": ("+ within * k_row", ""),
        "the page's first head": ("page + head * to.page_head", "page"),
    },
}  # fmt: skip
