"""The YAML of a server with the functions of strings (importable/wording.py)."""

SERVED = """\
    server: {listen: [ipc://s.sock], http: "127.0.0.1:0"}
    models:
      - name: shout
        function: wording:shout
        inputs: {text: {shape: "batch", element_type: str}}
        outputs:
          loud: {rule: rows, shape: "batch", element_type: str}
          back: {rule: rows, shape: "batch", element_type: bytes}
          sizes: {rule: rows, shape: "batch, 2", element_type: i64}
        calibration_s: 0
      - name: reverse
        function: wording:reverse
        inputs: {blob: {shape: "batch, n", element_type: bytes, at_most_bytes: 2 MiB}}
        outputs: {reversed: {rule: rows, shape: "batch, n", element_type: bytes}}
        calibration_s: 0
      - name: words
        function: wording:words
        inputs: {text: {shape: "texts", element_type: str}}
        outputs: {words: {rule: list, shape: "n", element_type: str}}
        calibration_s: 0
      - name: first
        function: wording:first
        inputs: {text: {shape: "", element_type: str}}
        outputs: {word: {shape: "", element_type: str}}
        calibration_s: 0
      - name: join
        function: wording:join
        inputs: {words: {shape: "n", element_type: str, at_most_bytes: 64}}
        outputs: {line: {shape: "", element_type: str}}
        calibration_s: 0
    chains:
      - name: hyphenate
        inputs: {text: words.text}
        stages:
          - {name: words, model: words, inputs: {text: text}}
          - {name: join, model: join, inputs: {words: words.words}, each: item of words.words}
          - {name: loud, model: shout, inputs: {text: join.line}, each: batch of join.line}
        outputs: {line: join.line, loud: loud.loud}
      - name: by_row
        inputs: {text: shout.text}
        stages:
          - {name: shout, model: shout, inputs: {text: text}, each: row of text}
          - {name: first, model: first, inputs: {text: shout.loud}, each: row of shout.loud}
        outputs: {loud: shout.loud, back: shout.back, word: first.word}
      - name: skipping
        on_error: skip
        inputs: {text: words.text}
        stages:
          - {name: words, model: words, inputs: {text: text}}
          - {name: join, model: join, inputs: {words: words.words}, each: item of words.words}
        outputs: {line: join.line, ok: join.ok}
"""
PLACES = {"in process": "in_process: true", "worker": "workers: [{count: 1, slots: 2}]"}
