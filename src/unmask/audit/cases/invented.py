"""Texts that are nobody's data, for demonstrations and for plans without data of their own."""

from __future__ import annotations

INVENTED_TEXTS = (
    "Patient Maria Keller, born 4 May 1961, was admitted with chest pain and shortness of breath.",
    "Please wire 48,200 euros to the account that ends in 7713 before Friday noon.",
    "The merger with Northwind stays confidential until the board has voted.",
    "My new address is 18 Harbour Lane, second floor, ring at Petersen.",
    "She told me that she has been seeing a therapist since last winter.",
    "The password of the shared drive is still the name of our first dog.",
    "We will close the plant in Leeds in March and let 120 people go.",
    "The biopsy was positive, and the treatment starts on Monday.",
    "He failed the drug test twice, so the offer was withdrawn.",
    "Our real margin is eleven percent, not the eighteen in the brochure.",
    "The children are alone at home from three to five every weekday.",
    "I voted for the other party this time, do not tell my father.",
    "The spare key lies under the blue flower pot behind the garage.",
    "The witness lives in Graz now and works at the central station.",
    "Her salary is 96,000 a year, with a bonus of two months in December.",
    "The prototype fails above 60 degrees, and the customer must not know.",
)
