// What kind of trouble a rule is about, so that the panel can say it in the reader's language; the fault itself is English.

// The first pattern that fits a rule's id decides. Ids are stable: see docs/rules.md.
const FAMILIES = [
  [/^extra\.deep\./, "deep"],
  [/^extra\.(dialect|storage|runtime|rules)\b|\.too_many_faults$/, "notice"],
  [/^(crash\.file$|extra\.file\.)/, "file"],
  [/^extra\.shards\./, "shards"],
  [/^extra\.foreign\./, "foreign"],
  [/\.scale_layout$/, "layout"],
  [/missing_tensors$|collision$|dense_and_packed$/, "tensors"],
  [/group_?size$|\.input_size$|\.rotation$|\.group$|linear_dtype$|six_bit$|^extra\.convrot\./, "settings"],
  [/(dtype|_type|scale_narrow)$/, "dtype"],
  [/(shapes?|\.rank|\.layout|\.data|\.empty)$/, "shape"],
  [/scale|codebook$|correction$|aux_not_one$/, "scale"],
  [/^(crash\.|extra\.)?(meta|marker|format|params|value|flag|quanto|layer\.count)\b/, "declaration"],
];

/** The family of a rule id; null for one that none of them names. */
export const familyOf = (rule) => FAMILIES.find(([pattern]) => pattern.test(rule))?.[1] ?? null;
